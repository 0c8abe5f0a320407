"""The rules of the house, the faults that chapters must notice, the rows that they must prove."""
