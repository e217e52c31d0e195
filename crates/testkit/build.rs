//! Compiles the protocols of the CRI client and of the fake dfdaemon. The compiler is a crate, so a
//! build needs no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let generator = || tonic_prost_build::configure().build_transport(false);
    let client = generator().build_server(false);
    client.compile_fds(protox::compile(["cri.proto"], ["proto"])?)?;
    let server = generator().build_client(false);
    Ok(server.compile_fds(protox::compile(["dfdaemon.proto"], ["proto"])?)?)
}
