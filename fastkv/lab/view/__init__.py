"""`fastkv view`: a page that shows what a cache kept of a text, when it evicted the rest, and what that cost."""
