"""Readers of source files: text, tables, records, FASTA, saved datasets."""
