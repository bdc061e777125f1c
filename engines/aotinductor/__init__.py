"""AOTInductor: the builder, and what it takes to compile for a GPU."""
