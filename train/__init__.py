"""Makes the weights: recipe, data, features, objective, loop."""
