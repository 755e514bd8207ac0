"""What of a model, and of what its forward does, a captured graph could not hold: it is refused, with its line."""
