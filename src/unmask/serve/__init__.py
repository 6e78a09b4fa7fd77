"""A model behind HTTP: an engine that batches by steps, an API, and a page that shows text emerge."""
