# The gateway alone, with Kubernetes. From the root of a checkout:
#   docker build -f deploy/docker/gateway.Dockerfile -t baleen-gateway:0.1.0 .
FROM rust:1.88-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN cargo build --locked --release -p baleen-gateway --bin gateway --features kubernetes

FROM debian:bookworm-slim
COPY --from=build /src/target/release/gateway /usr/local/bin/gateway
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["gateway"]
