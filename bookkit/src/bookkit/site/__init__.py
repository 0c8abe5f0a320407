"""Pages in every language put together, published, followed and looked at."""
