"""The rules of pages, the faults planted in them, the rows that they must prove."""
