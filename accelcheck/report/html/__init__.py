"""The report as one HTML file: Python makes verdict, causes and tables, and a script adds filters and case pages.

It reads records and results, runs nothing and imports no torch. Untrusted journals are text here, never markup.
"""
