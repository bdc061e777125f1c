"""What runs a model: protocols, and one module a backend."""
