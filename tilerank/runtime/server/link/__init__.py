"""Between the HTTP process and rank 0: messages, the queue before the engine, routing, and the loop of rank 0."""
