"""What the machine can do: FLOP/s, precision, memory."""
