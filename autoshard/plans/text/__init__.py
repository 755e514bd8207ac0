"""A plan as a file: its schema, reading and writing it, and how identical layers become one line."""
