"""What checkpoints store in place of plain floating-point weights, made dense tensor by tensor."""
