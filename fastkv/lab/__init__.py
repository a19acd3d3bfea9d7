"""What measures, shows and calibrates, and the command `fastkv`: it uses the library, which never imports it."""
