"""The bundled model with every policy, budget and ablation: measurements, tables, plots, and the page for choosing."""
