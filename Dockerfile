# The image of the program, for every architecture that the image of the first stage has:
#
#     docker buildx build --platform linux/amd64,linux/arm64 --tag blockyard .
#     podman build --tag blockyard .
#
# `make image` makes the same image for the architecture of this machine, without a container engine;
# it takes the lines after `FROM scratch` from here. docs/packages.md says how to run it.

ARG BUILD=docker.io/library/rust:1.95-bookworm
FROM ${BUILD} AS build
ARG SOURCE_DATE_EPOCH=0
COPY . /blockyard
RUN /blockyard/.ci/shipped /blockyard/.ci/image-root /image && \
    chown 65532:65532 /image/var/lib/blockyard /image/run/blockyard

FROM scratch
LABEL org.opencontainers.image.title="blockyard"
LABEL org.opencontainers.image.description="A block layer in user space"
LABEL org.opencontainers.image.licenses="MIT AND LGPL-2.1-or-later AND GPL-3.0-or-later WITH GCC-exception-3.1"
COPY --from=build /image /
# Sockets are in /run/blockyard.
ENV XDG_RUNTIME_DIR=/run
ENV BLOCKYARD_CONTROL=/run/blockyard/control.sock
VOLUME ["/var/lib/blockyard", "/run/blockyard"]
USER 65532:65532
ENTRYPOINT ["/usr/bin/blockyard"]
CMD ["serve", "--config", "/etc/blockyard/blockyard.toml", "--state", "/var/lib/blockyard"]
