"""Programs of the book, compiled for TPU and GPU too."""
