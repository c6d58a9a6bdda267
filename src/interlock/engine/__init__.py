"""The commands of the product, one transaction each."""
