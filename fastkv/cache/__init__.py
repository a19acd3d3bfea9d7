"""What one layer does with a prompt block and with a token: attend, score, select, compact. Knows no engine."""
