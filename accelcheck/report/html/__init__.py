"""The report as one HTML file. Python makes what is read first: verdict, causes, matrix and tables. A script adds filters and case pages.

It reads records and results, runs nothing and imports no torch. What a stranger's journal says is text here, never markup.
"""
