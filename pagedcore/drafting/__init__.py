"""What may come next in a sequence: guesses from text that is there already, and how many of them are worth a row."""
