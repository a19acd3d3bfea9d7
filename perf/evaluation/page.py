from pathlib import Path
PAGE = Path("x")
def write_page(out, page): pass
