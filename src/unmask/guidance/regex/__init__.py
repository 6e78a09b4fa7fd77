"""Regular-expression constraints: parser, byte and token automata, backward messages."""
