def write_report(path): pass
