"""The status page at /dashboard: one HTML page without anything from elsewhere, fed by /dashboard/state.

Its numbers are those of /metrics, read from the same registry. It never shows prompts, answers, tenants or keys.
Start at routes.py; state.py is what the page is told, page.js what it makes of it.
"""
