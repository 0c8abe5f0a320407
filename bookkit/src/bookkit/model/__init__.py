"""What the book consists of. Nothing here runs a cell or writes a file."""
