"""What the text of a hole must match, as users say it: a regular expression, a JSON schema or a grammar."""
