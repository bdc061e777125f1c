"""From requests to texts: the tokenizer, options, streams, the queue for slots, the engine."""
