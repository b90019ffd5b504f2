"""Tables, figures and one HTML page from the results of runs."""
