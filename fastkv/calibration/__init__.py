"""What is fitted to one model and stored in files, and how: a stock model runs over text, offline."""
