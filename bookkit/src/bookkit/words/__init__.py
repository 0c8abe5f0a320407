"""What is read: catalogues, translations, and the notebooks that are written from both."""
