"""Operators of autoshard's own (``torch.ops.autoshard``) that stand in captured graphs, and what is in such parts."""
