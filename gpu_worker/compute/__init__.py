"""The compute process: messages from the worker, their translation, the engine they go to."""
