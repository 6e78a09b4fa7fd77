"""One module per published checkpoint format."""
