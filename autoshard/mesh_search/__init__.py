"""The search over meshes: every shape that so many devices can have, cut by bounds, and the best plan among them."""

from .search import Asked, Candidate, MeshSearch, Verdict, search_meshes
from .shapes import AXES, MOST_AXES, Shape, shapes_of

__all__ = [
    "AXES",
    "MOST_AXES",
    "Asked",
    "Candidate",
    "MeshSearch",
    "Shape",
    "Verdict",
    "search_meshes",
    "shapes_of",
]
