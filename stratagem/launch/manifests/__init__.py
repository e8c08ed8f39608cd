"""What runs where in containers, and the files that describe it to docker-compose and Kubernetes."""
