"""`sg.run()` and `stratagem submit`: validate, containerise, submit, follow."""
