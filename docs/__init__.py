"""The documents, and what generates the part of them that follows from the code."""
