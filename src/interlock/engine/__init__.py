"""Commands: the verbs of the product, one transaction each."""
