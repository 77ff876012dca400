{{/* The configuration of the server: the keys of `topwork serve`, in a file or as Serve's args. */}}

{{- define "topwork.ranksPerHost" -}}
{{- $tp := int (default 1 .Values.topwork.tp) }}
{{- $perHost := int .Values.scheduler.ranksPerHost }}
{{- ternary $tp $perHost (eq $perHost 0) }}
{{- end }}

{{/* Adapters by name: values win over the ConfigMap that others keep. */}}
{{- define "topwork.adapters" -}}
{{- $served := dict }}
{{- with .Values.adapters.configMap }}
{{- $found := lookup "v1" "ConfigMap" $.Release.Namespace . }}
{{- if not $found }}
{{- fail (printf "adapters.configMap: there is no ConfigMap %q in namespace %q, or this is rendered without a cluster, as helm template does" . $.Release.Namespace) }}
{{- end }}
{{- $served = merge $served (default dict $found.data) }}
{{- end }}
{{- $served = mergeOverwrite $served .Values.adapters.served }}
{{- $list := list }}
{{- range $name := keys $served | sortAlpha }}
{{- $directory := get $served $name }}
{{- if not (hasPrefix "/" $directory) }}
{{- if eq $.Values.adapters.source "none" }}
{{- fail (printf "adapters.served: %s is in %q, below adapters.mountPath, but adapters.source is none: give it a whole path" $name $directory) }}
{{- end }}
{{- $directory = printf "%s/%s" $.Values.adapters.mountPath $directory }}
{{- end }}
{{- $list = append $list (printf "%s=%s" $name $directory) }}
{{- end }}
{{- toJson $list }}
{{- end }}

{{/* The configuration, as JSON. */}}
{{- define "topwork.config" -}}
{{- $config := deepCopy .Values.topwork }}
{{- $_ := set $config "host" "0.0.0.0" }}
{{- $_ := set $config "port" (int .Values.service.port) }}
{{- if .Values.apiKeys.secretName }}
{{- $_ := set $config "api_key_file" "/etc/topwork/keys/keys.yaml" }}
{{- end }}
{{- if .Values.tokenRules.configMapName }}
{{- $_ := set $config "oidc_rules" "/etc/topwork/rules/rules.yaml" }}
{{- end }}
{{- if eq .Values.model.source "hub" }}
{{- $_ := set $config "model" .Values.model.hubId }}
{{- else }}
{{- $_ := set $config "model" (printf "%s/%s" .Values.model.mountPath .Values.model.path | trimSuffix "/") }}
{{- end }}
{{- $adapters := concat (default list $config.adapter) (include "topwork.adapters" . | fromJsonArray) }}
{{- if $adapters }}
{{- $_ := set $config "adapter" $adapters }}
{{- end }}
{{- if .Values.adapters.watch }}
{{- $_ := set $config "adapter_dir" (append (default list $config.adapter_dir) .Values.adapters.mountPath) }}
{{- end }}
{{- toJson $config }}
{{- end }}

{{/* Of two routers, in pods of their own, one may die. */}}
{{- define "topwork.routers" -}}
{{ int (default 2 .Values.topwork.routers) }}
{{- end }}

{{/* The Serve config of a RayService. */}}
{{- define "topwork.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.service.port }}
applications:
  - name: topwork
    route_prefix: /
    import_path: deploy.serving.app:build
    args:
      {{- $config := include "topwork.config" . | fromJson }}
      {{- $_ := set $config "routers" (include "topwork.routers" . | int) }}
      {{- $config | toYaml | nindent 6 }}
    deployments:
      # A router needs a pod of the router group, which has this resource; while routers are
      # updated, two fit.
      - name: Router
        ray_actor_options:
          num_cpus: 1
          resources:
            topwork_router: 0.5
{{- end }}

{{- define "topwork.configName" -}}
{{ include "topwork.fullname" . }}-config-{{ include "topwork.config" . | sha256sum | trunc 8 }}
{{- end }}
