"""The engines that run a model: protocols, and one module per backend."""
