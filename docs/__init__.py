"""The documents, and the generator for the parts that follow from the code."""
