"""What is put into the processes under test."""
