"""The engines that fastkv plugs into, one a folder."""
