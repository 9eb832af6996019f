"""Spends the weights: tree, verification, cache, engine, adaptation, evaluation."""
