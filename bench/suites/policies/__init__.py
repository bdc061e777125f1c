"""What choosing gamma for each round brings."""
