"""The page: one HTML file with all plots of a run, for a report and for the live view."""
