"""Results as one HTML file with plots in SVG. It loads nothing, runs no script, and follows the reader's light or dark.

Start with page.py; charts.py says what each plot shows, svg.py draws.
"""
