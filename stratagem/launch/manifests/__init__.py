"""What runs where in containers, and the files that say so to docker-compose and Kubernetes."""
