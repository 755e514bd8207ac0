"""Stacks of alike blocks: a short model is captured and repeated, so that capture does not slow down with depth."""
