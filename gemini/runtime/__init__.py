"""The only home of effects: memory, streams, collectives, hooks. Plans come from elsewhere."""
