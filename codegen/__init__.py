"""Code that is generated from other files of this repository."""
